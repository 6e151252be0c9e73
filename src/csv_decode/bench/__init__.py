"""Measuring: our head against what people would use instead, and what a head costs within a decoding step.

`states` has the hidden states to measure on, `peers` the other methods, `run` the measurement, `plots` its pictures,
`steps` the decoding steps for `csv-decode advise`, and `machine` what the figures depend on.
"""
