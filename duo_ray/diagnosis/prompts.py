"""What is asked when the user gives no prompts: eight sorts of text, because a draft may know some and not others."""

BUILT_IN = (
    "Why does ice float on water?",
    "A baker makes 18 trays of 24 rolls and sells three quarters of them by noon. How many rolls are left?",
    "Write a Python function that returns the longest stretch of equal neighbours in a list.",
    "Translate to French: The last ferry leaves at nine, and after that the island belongs to the sheep.",
    "List the planets of the solar system, one per line.",
    "Write a short story about a lighthouse keeper who finds a door in the rocks.",
    "Summarise in two sentences: Most people believe that bread goes stale because it dries out. Drying plays a part, "
    "but the main reason is that the starch hardens again as it cools.",
    "Give me a JSON object with the keys name, age and city for three people.",
)
