// One answer as it comes: its text, its tokens, its rounds, and what follows from them.

class Answer {
  constructor(request) {
    this.request = request;
    this.text = "";
    this.rounds = [];
    this.usage = null;
    this.reason = null;
    this.asked = performance.now();
    this.first = null;
    this.last = null;
    /** The same request once more, decoded plainly and as it was: to compare. */
    this.plain = [];
    this.again = [];
    this.comparing = false;
  }

  /** Takes an event of the stream; answers the round that it reports, if it does. */
  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return null;
    const now = performance.now();
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.text += choice.delta?.content ?? choice.text ?? "";
    const round = choice.draft_round ?? null;
    if (round || choice.delta?.content || choice.text) {
      this.first ??= now;
      this.last = now;
    }
    if (round) {
      round.number = this.rounds.length;
      this.rounds.push(round);
    }
    return round;
  }

  /** Tokens so far. */
  get tokens() {
    return this.usage?.completion_tokens ?? this.rounds.reduce((sum, r) => sum + r.tokens.length, 0);
  }

  /** Tokens per second after the first one; null before there are two. */
  get rate() {
    const seconds = (this.last - this.first) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  /** Rounds that verified a tree, if only of one node: all but the one of the prompt. */
  get verified() {
    return this.rounds.filter((round) => round.tree);
  }

  /** Tokens of a verified round on average, the bonus included. */
  get acceptLength() {
    const rounds = this.verified;
    if (!rounds.length) return this.usage?.speculative?.spec_accept_length ?? null;
    return rounds.reduce((sum, round) => sum + round.tokens.length, 0) / rounds.length;
  }

  /** How many rounds the server says it took, where anything was drafted. */
  get verifications() {
    return this.usage?.speculative?.spec_verify_ct ?? null;
  }

  /** The rate to compare with plain: of several runs alike the median. */
  get typicalRate() {
    // N-grams that have learned the answer take fewer rounds, which says nothing about the first.
    const alike = this.again.filter((run) => run.verifications === this.verifications);
    return medianRate(alike) ?? this.rate;
  }

  /** By depth from 1 on: rounds whose tree reaches it, and those that accepted a draft there. */
  get acceptance() {
    const depths = [];
    for (const { tree } of this.verified) {
      const accepted = tree.filter((node) => node.accepted).length - 1;
      const deepest = Math.max(...tree.map((node) => node.depth));
      for (let depth = 1; depth <= deepest; depth++) {
        const counts = (depths[depth - 1] ??= { depth, reached: 0, accepted: 0 });
        counts.reached += 1;
        if (depth <= accepted) counts.accepted += 1;
      }
    }
    return depths;
  }
}

/** The median of the rates of answers that have one; null if none has. */
function medianRate(answers) {
  const rates = answers.map((answer) => answer.rate).filter((rate) => rate !== null);
  rates.sort((a, b) => a - b);
  return rates.length ? (rates[(rates.length - 1) >> 1] + rates[rates.length >> 1]) / 2 : null;
}

/** The class that a token or node is shaded by: by depth, the model's own, or nothing drafted. */
function shadeOf(depth, drafting) {
  if (depth) return `d${Math.min(depth, 6)}`;
  return drafting ? "own" : "undrafted";
}

/** A token's text where a space or the end of a line must be seen. */
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ /, "·").replace(/ $/, "·") || "∅";
}
