"""The time of a step, modeled: models of 1B to 671B on 8 to 16,384 ranks, beside runs that others
published.
"""
