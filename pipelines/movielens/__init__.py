"""Next-item recommendation: interactions of users, one example a user, ranked over all items."""
