"""The methods that users choose from, and what the planner must know of each."""
