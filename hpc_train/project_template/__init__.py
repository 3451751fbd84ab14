"""Files of the project that `hpc-train new` writes; each has the suffix .txt here."""
