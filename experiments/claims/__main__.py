"""`python -m experiments.claims` writes every verdict on its page, and the index in experiments/README.md."""

from experiments.claims.pages import CLAIMS, write_pages

if __name__ == "__main__":
    write_pages()
    for claim in CLAIMS:
        print(f"{claim.verdict().value}  {claim.title}")
