"""Holds the package `horovod` that puts dad in Horovod's place.

It is found when this directory is on PYTHONPATH, which `dad overlay` prints.
"""
