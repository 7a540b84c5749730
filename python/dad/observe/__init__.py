"""What a job sends, from its report, and what a bug report needs."""
