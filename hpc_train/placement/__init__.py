"""Which rank on which slot: the cost of a rank map on a fabric, and the search for a better one."""
