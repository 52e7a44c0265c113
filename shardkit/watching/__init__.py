"""Find out where ranks disagree: ``watch`` while they run, digests of their values afterwards."""
