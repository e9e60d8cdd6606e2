"""Trains by a plan: each rank holds one stage of one component and runs its action list, step after step."""
