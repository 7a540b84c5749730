"""Elastic jobs: which hosts there are, which rank each worker has, what follows when one is lost.

driver.py decides, without processes, sockets or clocks; launch.py carries out what it decides.
"""
