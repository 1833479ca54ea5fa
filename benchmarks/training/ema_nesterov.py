"""Compare Muon with and without EMA-Nesterov by held-out loss, on two texts, over seeds.

    python -m benchmarks.training.ema_nesterov                 # everything; can be stopped and continued
    python -m benchmarks.training.ema_nesterov --minutes 10    # starts no run after ten minutes

The small transformers of `variants`. On each text the first seed searches each recipe's rate; the other seeds run at
the best one.
"""

import functools

from benchmarks.training.book import Book, command_line, search, summary
from benchmarks.training.int8_momentum import TEXTS, best_rates, text
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import SIZES, Recipe, Trainer

RATES = (4e-3, 8e-3, 1.6e-2)
RECIPES = {
    "Muon": Recipe(),
    "EMA-Nesterov, beta 0.6, decay 0.95": Recipe(look_ahead=0.6, look_ahead_decay=0.95),
    "EMA-Nesterov, beta 0.3, decay 0.99": Recipe(look_ahead=0.3, look_ahead_decay=0.99),
}


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__, "ema_nesterov", **SIZES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    args = parser.parse_args(arguments)
    _, adam_rate = best_rates()
    settings = {size: getattr(args, size) for size in SIZES} | {"adam_rate": adam_rate}
    book = Book(args.name, settings, args.minutes)
    model = Model("MHA", args.layers, args.width, args.head_size, args.context)
    first, *others = args.seeds
    for name in TEXTS:
        for recipe in args.recipes:
            trainer = Trainer(model, RECIPES[recipe], args.steps, args.batch, text(name))
            run = functools.partial(trainer.run, adam_rate=adam_rate)
            key = {"text": name, "recipe": recipe, "steps": args.steps}
            rate = search(book, {**key, "seed": first}, RATES, functools.partial(run, seed=first))
            for seed in others if rate is not None else ():
                one = {**key, "seed": seed, "learning_rate": rate}
                book.ensure(one, functools.partial(run, rate, seed=seed))
    rows = summary(book.rows, ("text", "recipe"))
    book.write(rows, recipes=rows)


if __name__ == "__main__":
    main()
