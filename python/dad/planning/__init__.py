"""How the ranks of an optimizer come to follow one plan. Needs no framework.

Not called `dad.plan`: that is a function (dad/__init__.py), and a package would take its place.
"""
