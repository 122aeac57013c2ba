"""The twenty sentences of the paper's Appendix A: ten facts, and each of them in other words."""

# ruff: noqa: E501 (sentences are kept whole)

from __future__ import annotations

__all__ = ["PAIRS"]

#: (original, rewrite), in the appendix's order.
PAIRS: tuple[tuple[str, str], ...] = (
    (
        "The Great Wall of China is the longest wall in the world, stretching over 21,000 kilometers.",
        "Spanning over 21,000 kilometers, the Great Wall of China holds the record for being the longest wall "
        "worldwide.",
    ),
    (
        "In 1969, Neil Armstrong became the first human to set foot on the Moon during the Apollo 11 mission.",
        "During the Apollo 11 mission in 1969, Neil Armstrong made history by becoming the first person to walk on "
        "the lunar surface.",
    ),
    (
        'The theory of evolution by natural selection was first proposed by Charles Darwin in his book "On the Origin of Species" in 1859.',
        'Charles Darwin introduced the concept of evolution by natural selection in his 1859 publication titled "On the Origin of Species".',
    ),
    (
        "The United Nations was founded in 1945 after World War II to maintain international peace and security.",
        "Following the conclusion of World War II, the United Nations was established in 1945 to foster "
        "international peace and security.",
    ),
    (
        "The Eiffel Tower, constructed in 1889 for the World's Fair, is one of the most iconic landmarks in Paris, "
        "France.",
        "One of the most recognizable structures in Paris, France, the Eiffel Tower was built in 1889 for the "
        "World's Fair.",
    ),
    (
        "The French Revolution, which began in 1789, marked the end of the monarchy and the establishment of a "
        "republic in France.",
        "The monarchy in France was abolished, and a republic was established as a result of the French Revolution, "
        "which commenced in 1789.",
    ),
    (
        "The human brain contains approximately 86 billion neurons, making it the most complex organ in the human "
        "body.",
        "The most intricate organ in the human body, the brain, is composed of roughly 86 billion neurons.",
    ),
    (
        "In the 2020 United States presidential election, Joe Biden defeated incumbent Donald Trump to become the "
        "46th president.",
        "Joe Biden secured victory over the sitting president, Donald Trump, in the 2020 United States presidential "
        "election, becoming the 46th president.",
    ),
    (
        "The Mona Lisa, painted by Leonardo da Vinci in the early 16th century, is one of the most famous paintings "
        "in the world.",
        "Leonardo da Vinci's early 16th-century painting, the Mona Lisa, is widely regarded as one of the most "
        "renowned artworks globally.",
    ),
    (
        "Climate change is a global issue caused by the increase of greenhouse gases in the atmosphere, primarily "
        "due to human activities.",
        "The primary cause of climate change, a worldwide problem, is the accumulation of greenhouse gases in the "
        "atmosphere, largely attributed to human activities.",
    ),
)
