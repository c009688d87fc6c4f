"""Why a plan gains or does not: what keeps regions from overlapping, and what each decision is worth."""
