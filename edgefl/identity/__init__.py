"""Identities of a fleet: certificates, one-time enrolment tokens, signatures, revocation."""
