"""Elastic jobs: the hosts, the rank of each worker, and the reaction when one is lost.

driver.py decides, without processes, sockets or clocks; launch.py carries out the decisions.
"""
