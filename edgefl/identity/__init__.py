"""Who is who in a fleet: certificates, one-time tokens, signatures, revocation."""
