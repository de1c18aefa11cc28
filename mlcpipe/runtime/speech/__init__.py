"""Sound to text: a model that hears, its rules about timestamps, and windows that follow each other.

hearing.py      one window: the encoder, the keys and values of its sound, steps of the decoder
rules.py        which tokens may come next
decoding.py     the text of a window: temperatures, and when to try another one
segments.py     what a window's tokens say about time, and where the next window begins
transcriber.py  a whole sound
formats.py      transcripts as text, JSON, SubRip and WebVTT
"""
