"""What a budget costs in answers: tasks x lengths x budgets, on the real engine."""
