//! How large a draft tree is.

/// A tree's bounds: how deep, how wide, and how many nodes are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    steps: usize,
    topk: usize,
    nodes: usize,
    /// Whether a model drafts it, row by row.
    rows: bool,
}

/// Why there is no such tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A width of zero.
    #[error("topk must be at least 1")]
    NoWidth,
    /// More nodes than the tree can have, or none beside the root.
    #[error(
        "{nodes} draft tokens do not suit {steps} steps of topk {topk}: they must be from 2 to \
         {most}"
    )]
    Nodes {
        /// Nodes asked for, the root included.
        nodes: usize,
        /// Steps asked for.
        steps: usize,
        /// Width asked for.
        topk: usize,
        /// The most nodes that such a tree can have.
        most: usize,
    },
}

/// The widest tree; beyond it, a draft's candidates would cost more than they could give.
pub const MOST_TOPK: usize = 64;
/// The deepest tree.
pub const MOST_STEPS: usize = 64;

impl Shape {
    /// No drafting: the bonus alone.
    pub const PLAIN: Shape = Shape { steps: 0, topk: 1, nodes: 1, rows: true };

    /// A tree of `steps` levels in which each node has up to `topk` children and of which the
    /// best `nodes` are verified, the root included. A chain always has steps + 1 nodes.
    pub fn new(steps: usize, topk: usize, nodes: usize) -> Result<Self, ShapeError> {
        if topk == 0 {
            return Err(ShapeError::NoWidth);
        }
        if steps == 0 {
            return Ok(Self::PLAIN);
        }
        if topk == 1 {
            return Ok(Self::chain(steps));
        }
        let most = Self::most_nodes(steps, topk);
        if !(2..=most).contains(&nodes) {
            return Err(ShapeError::Nodes { nodes, steps, topk, most });
        }
        Ok(Self { steps, topk, nodes, rows: true })
    }

    /// A chain of `steps` drafts.
    pub fn chain(steps: usize) -> Self {
        Self { steps, topk: 1, nodes: steps + 1, rows: true }
    }

    /// The nodes of a tree from which nothing is cut: the root, K at depth 1, and K children of
    /// each of K nodes at every depth below.
    pub fn most_nodes(steps: usize, topk: usize) -> usize {
        match steps {
            0 => 1,
            _ => topk.saturating_mul(topk).saturating_mul(steps - 1).saturating_add(1 + topk),
        }
    }

    /// Levels below the root.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Children of a node, and nodes that go on at each level.
    pub fn topk(&self) -> usize {
        self.topk
    }

    /// Nodes that are verified, the root included.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The same tree with at most `steps` levels.
    pub fn capped(&self, steps: usize) -> Self {
        if steps >= self.steps {
            return *self;
        }
        if steps == 0 {
            return Self::PLAIN;
        }
        let nodes = self.nodes.min(Self::most_nodes(steps, self.topk));
        Self { steps, nodes, ..*self }
    }

    /// The smallest tree that none of `shapes` exceeds in depth, width or nodes.
    pub fn covering(shapes: impl IntoIterator<Item = Shape>) -> Self {
        let both = |a: Shape, b: Shape| Self {
            steps: a.steps.max(b.steps),
            topk: a.topk.max(b.topk),
            nodes: a.nodes.max(b.nodes),
            rows: if b == Self::PLAIN { a.rows } else { b.rows },
        };
        shapes.into_iter().fold(Self::PLAIN, both)
    }

    /// What became of it where the tree that was drafted is no deeper and has no more nodes.
    pub fn within(&self, depth: usize, nodes: usize) -> Self {
        let least = self.capped(depth);
        Self { nodes: least.nodes.min(nodes), ..least }
    }

    /// The same tree, looked up on the host: no rows are computed for it.
    pub fn without_rows(self) -> Self {
        Self { rows: self == Self::PLAIN, ..self }
    }

    /// Rows that the draft computes for its own nodes: all but the last level go on.
    pub fn draft_rows(&self) -> usize {
        if self.rows { self.steps.saturating_sub(1) * self.topk } else { 0 }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.steps, self.topk) {
            (0, _) => f.write_str("plain"),
            (steps, 1) => write!(f, "a chain of {steps}"),
            (steps, topk) => {
                write!(f, "trees of {steps} steps, topk {topk}, {} nodes", self.nodes)
            }
        }
    }
}
