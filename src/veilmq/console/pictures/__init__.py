"""Pictures that the server draws: where each line, bar and mark is. The templates make SVG of them."""
