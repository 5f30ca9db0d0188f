"""The batch plan: which utterances every rank reads in every step."""
