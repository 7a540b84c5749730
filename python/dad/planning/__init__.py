"""What is sent how: ranks observe, agree, and plan by the same pure function."""
