"""Which of the eligible devices train a round."""
