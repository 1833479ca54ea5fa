"""What a function does with its parameters, read from its jaxpr: matrices, attention,
largest logits.

A parameter is a matrix because the function multiplies by it. So nothing here asks for names:
`program.inspect` traces the function, `graph` makes one flat list of its operations, and `follow`
goes through the list once, with one rule for each primitive. It keeps for each array a `Value`:

- **views**: the parameters that the array is made of, each with a `layout`: for each axis of the
  parameter the position of every entry, an array of NumPy's that a reshape, a slice or a transpose
  moves as it moves the entries (`move_rules.moved_by`, which moves the tables of the certificate
  too).
- **projections**: the products with parameters that the array comes from, again with a layout:
  which columns are where. A projection is linear in its parameter until a nonlinear operation takes
  it.
- **logits**: a product of two projections, up to the maximum and the exponential of its softmax
  (`follow_logits`). Which arrays added to them are masks say the numbers that these may hold
  (`masks_or_biases`).
- what it depends on at all: data, random numbers, parameters, products.

The rules (of `move_rules`, `entrywise_rules`, `reduction_rules` and `product_rules`; their table is
in `rules`) record in `records` what is done with each parameter: a use as a product with its rows,
columns and batch, a look-up, a sum. Columns of one product that different operations take are
parts: so a fused query-key-value kernel is three matrices. An operation without a rule may be
anything: next to one, nothing is decided, and an attention is refused. One whose rule does not
handle its settings makes what it touches unknown.

The words, by a kernel w [64, 8 * 16] of eight heads and its product q = x @ w, reshaped to
[batch, length, 8, 16]:

- A **run** has for each entry of q its positions along one axis of w. Along axis 1 of w these are 0
  to 127, in steps of 16 along axis 2 of q and of 1 along axis 3. They don't depend on axes 0 and 1
  of q, which come from x.
- A **leaf** is the number of a parameter, a **node** an operation, a **value** the number of an
  array or, as a `Value`, what is known of it. A number of -1 says that there is none.
- A value is a **weight** if it is made of parameters without data (constants and random numbers may
  be in it), and an **activation** if it is made of parameters and data. Its **facts** say something
  of its axes, such as "one hot".
- A **use** is one thing that is done with a parameter. The use of w in x @ w is a **product**, of
  which a `Product` notes what becomes of it. A **layer** is an operation that multiplies again:
  what comes before it is no output head.
- A **region** is the part of w that entries come from, as for q[:, :, 2] the columns 32 to 47:
  {(1, mask)} with a mask of booleans along axis 1, as bytes.
  Axes of which all is there are left out.
- A **hole** is an entry that is not of w, as in a concatenation of q with zeros.
- **Scores** are the last product of two activations that an array is made of: perhaps those of
  queries and keys.
- An entry that a sum or a norm made of several columns has the positions of all of them; **loops**
  are axes of w that a scan, a look-up or a batch axis goes over, and they count matrices.
- A projection is **unmixed** as long as no nonlinear operation puts several of its columns
  together. Then its region may become a part. A sum of columns leaves it unmixed.
- A **span** says which entries of w a clip scales by one factor for each head, in the words of
  `Scale`. A **probe** says in which body, nested in others, the logits are a variable, and which of
  its axes count heads.
- An operation is **live** if a result depends on it, and **trained** if a gradient comes back to
  it.

From these records follow two answers:

- `decisions`: for each parameter its axes as a matrix (`matrix_axes`), or AdamW with the line that
  says why, such as an output head (`product_destination`). What may be a table, or comes before
  frozen numbers, is decided with a warning. Parameters whose uses contradict each other are left to
  names, with the reason; so are those that an unknown operation takes, or only a gradient inside of
  the function, and all of them next to an operation without a rule.
- `clippable_attention`: for each product of queries and keys of which a softmax reads values, the
  runs of the parameters that a clip has to scale, and where its logits are. These are proposals,
  queries and keys before queries alone: whether a clip scales these logits and nothing else is for
  the certificate to say. A product whose exponentials read values and that can't be followed is
  listed and refused with its line; so no attention is missed silently. `name_attentions` names them
  by the paths of their parameters, and writes what is scaled as sites.

`clip_certificate` then proves each clip, or refuses it. It draws a factor for each head and follows
the logarithms of the factors through every operation that a clip changes: the logits of each head
must get exactly their factor, and no scalar that the function returns may change (an array may,
such as a returned parameter). It ends at the logits: that nothing but their softmax reads them is
for `clippable_attention` to check. It trusts no layout and no projection, so a mistake in them
costs a refusal. One thing it does not see, and `clippable_attention` refuses: heads of one kernel
each that are put together.

`measure` runs the function with its largest logits as further results, and is otherwise the
function to the bit; `value_and_grad` differentiates that, and `jax_versions` has what differs
between versions of JAX.

A new primitive often needs one word: in `_ENTRYWISE` (`entrywise_rules`) if it works entry by entry
(an exponential also in `follow_logits.EXPONENTIALS`, which refuses its softmax, as only base e is
followed in `follow_logits.after`; a root or a power in `follow_logits._ROOTS`; linear in several
operands, as a sum is, also in `values.SUMS`), in `SAME` (`move_rules`) if it moves nothing, in
`_MIXES` (`rules`) if it mixes columns, in `_CALLS` (`graph`) if it calls a body. One that JAX can
say in others, but split, pad and neg, has a line in `_REWRITTEN` (`graph`), unless logits may lie
between. One that moves the entries of one operand has a case in `move_rules.moved_by`, which the
certificate uses too, and its name at `move_rules._one_operand`; if a mask may pass it, also in
`possible_numbers._MOVES`. A reduction has its name at `reduction_rules._reduce`, and if a clip may
pass it, as a maximum, also in `Certificate._moved`; one with exponentials inside, such as a
logsumexp, needs a line in `_REWRITTEN`, or an attention by it may be missed. Otherwise write a
function (records, node) -> values under `@rule("its name")`: `records.inputs(node)` has the values
of the operands, `node.params` the equation's parameters. Raise `NotFollowed` for settings that you
do not handle. If it has several operands and a clip may pass it, the certificate needs its own
line. Tests: a program in `tests/inspect/hostile_programs.py`, in `attention_programs.py` if a clip
may pass it, and the sets in `test_rules.py`. A program is skipped by hand where the oldest JAX
lacks its primitive.
"""
