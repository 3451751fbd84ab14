"""The code of a job, frozen when it is submitted: what is edited later changes nothing of it."""
