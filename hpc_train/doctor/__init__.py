"""`hpc-train doctor`: what works on this machine or in this job, what does not, and what to do about it."""
