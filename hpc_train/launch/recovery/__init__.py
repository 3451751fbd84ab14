"""After an attempt has failed: find the rank that failed first, and decide whether and where the run goes on."""
