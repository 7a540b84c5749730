"""Local steps: ranks train by themselves for a while and then average the changes of their weights.

This package knows no framework; dadrun and dry runs use settings.py, outer.py and saved.py without the core.
docs/local_steps.md tells users what it does.
"""
