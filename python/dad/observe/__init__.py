"""Looking at a job: what it has sent, from its report; and what a bug report needs."""
