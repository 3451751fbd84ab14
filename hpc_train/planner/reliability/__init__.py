"""Failures, saves and prices: what a whole run takes in days and money, given the time of a step."""
