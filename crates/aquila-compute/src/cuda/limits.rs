//! What the kernels take at most, known before anything is loaded.

use super::launch::GRID_ROWS;
use crate::round::StateBounds;
use crate::{Error, HeadShape, Limit, PlanBounds, Result};

/// Nodes of a level of a tree that go on: `MOST_BEAM` of `trees.cu`.
const MOST_TOPK: usize = 256;
/// Values of an attention head: `PLAIN_WIDTH` of `plain.cu`, and no kernel has room for more.
const MOST_HEAD: usize = 512;
/// Values of a head come in this many: one 16-byte load of bfloat16 brings them.
const HEAD_ALIGN: usize = 8;

/// Refuses passes, rounds and heads that no kernel takes.
pub(super) fn check(passes: PlanBounds, bounds: &StateBounds, heads: HeadShape) -> Result<()> {
    let topk = bounds.shape.topk();
    hold(Limit::PassRows, passes.rows.max(passes.outputs), GRID_ROWS)?;
    hold(Limit::Topk, topk, MOST_TOPK)?;
    hold(Limit::Outputs, bounds.logits.max(bounds.places * topk), GRID_ROWS)?;
    check_head(heads.head_dim)
}

/// Refuses attention heads of a width that no kernel takes.
pub(super) fn check_head(width: usize) -> Result<()> {
    if !width.is_multiple_of(HEAD_ALIGN) {
        return Err(Error::Unavailable(format!(
            "heads of width {width} are not available on CUDA: a multiple of {HEAD_ALIGN} is needed"
        )));
    }
    hold(Limit::HeadWidth, width, MOST_HEAD)
}

fn hold(what: Limit, asked: usize, most: usize) -> Result<()> {
    if asked <= most {
        return Ok(());
    }
    Err(Error::Limit { what, asked, most })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::{Shape, Verify};

    fn refused(rows: usize, places: usize, shape: Shape, head_dim: usize) -> Option<Error> {
        let passes = PlanBounds { rows, outputs: 1, slots: 1 };
        let bounds = StateBounds {
            places,
            stride: 1,
            drafts: false,
            groups: Vec::new(),
            hidden: false,
            first_parked: rows,
            parked_rows: 0,
            chunk: 1,
            shape,
            verify: Verify::Match,
            vocabulary: 1,
            outputs: 1,
            logits: 1,
            simulate: None,
        };
        let heads = HeadShape { heads: 1, kv_heads: 1, head_dim };
        check(passes, &bounds, heads).err()
    }

    #[test]
    fn what_no_kernel_takes_is_refused_by_what_it_is() {
        let plain = Shape::PLAIN;
        assert!(refused(65_535, 65_535, plain, 512).is_none());
        for (error, limit) in [
            (refused(65_536, 48, plain, 64), Limit::PassRows),
            (refused(512, 65_536, plain, 64), Limit::Outputs),
            (refused(512, 48, Shape::new(2, 257, 300).unwrap(), 64), Limit::Topk),
            (refused(512, 48, plain, 520), Limit::HeadWidth),
        ] {
            let found = matches!(error, Some(Error::Limit { what, .. }) if what == limit);
            assert!(found, "{limit:?}: {error:?}");
        }
        assert!(matches!(refused(512, 48, plain, 60), Some(Error::Unavailable(_))));
    }

    #[test]
    fn the_limits_are_those_of_the_kernels() {
        let defines = |source: &str, name: &str, value: usize| {
            source.lines().any(|line| line.starts_with(&format!("#define {name} {value} ")))
        };
        assert!(defines(include_str!("kernels/trees.cu"), "MOST_BEAM", MOST_TOPK));
        assert!(defines(include_str!("kernels/plain.cu"), "PLAIN_WIDTH", MOST_HEAD));
    }
}
