"""Commands beside the agent: doctor, profile, enrolment."""
