"""Makes every small mistake in the code, one at a time, and looks whether the tests notice."""
