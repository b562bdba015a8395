//! Turns to compile grammars: few at a time, and equal ones one after the other.
//!
//! A grammar may take seconds and hundreds of megabytes; one whose client leaves before its turn is
//! not compiled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use crate::grammars::Digest;
use crate::refusal::Refusal;

/// Grammars that are compiled at a time.
const COMPILE_TURNS: usize = 4;

/// Turns to compile grammars.
#[derive(Debug)]
pub(crate) struct CompileTurns {
    turns: Arc<Semaphore>,
    /// What requests with the same grammar wait for.
    grammars: Mutex<HashMap<Digest, Weak<AsyncMutex<()>>>>,
}

/// Held by the one request that may compile a grammar.
pub(crate) type Alone = OwnedMutexGuard<()>;

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct CompileTurn {
    _turn: OwnedSemaphorePermit,
    _alone: Alone,
}

impl Default for CompileTurns {
    fn default() -> Self {
        Self { turns: Arc::new(Semaphore::new(COMPILE_TURNS)), grammars: Mutex::default() }
    }
}

impl CompileTurns {
    /// Waits until no other request compiles this grammar.
    pub async fn alone(&self, grammar: Digest) -> Alone {
        let waited_for = {
            // A panic between two changes could only leave what nothing waits for.
            let mut grammars = self.grammars.lock().unwrap_or_else(PoisonError::into_inner);
            grammars.retain(|_, waited_for| waited_for.strong_count() > 0);
            let known = grammars.get(&grammar).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let new = Arc::default();
                grammars.insert(grammar, Arc::downgrade(&new));
                new
            })
        };
        waited_for.lock_owned().await
    }

    /// Waits for a turn.
    pub async fn turn(&self, alone: Alone) -> CompileTurn {
        let turn = self.turns.clone().acquire_owned().await;
        CompileTurn { _turn: turn.expect("nothing closes the semaphore"), _alone: alone }
    }
}

impl CompileTurn {
    /// Compiles on a thread where it keeps no other request waiting. The turn ends with the work, also
    /// when its client is gone.
    pub async fn run<T: Send + 'static>(
        self,
        compile: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let compiling = tokio::task::spawn_blocking(move || {
            let compiled = compile();
            drop(self);
            compiled
        });
        compiling.await.map_err(|_| Refusal::failed("the grammar could not be compiled"))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn grammar(number: usize) -> Digest {
        [number as u8; 32]
    }

    #[test]
    fn grammars_of_clients_that_leave_are_not_compiled() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _inside = runtime.enter();
        let turns = CompileTurns::default();
        let begun = Arc::new(AtomicUsize::new(0));
        let (ends, ended): (Vec<_>, Vec<_>) = (0..COMPILE_TURNS).map(|_| channel::<()>()).unzip();
        let compile = |number, end: Option<std::sync::mpsc::Receiver<()>>| {
            let (turns, begun) = (&turns, begun.clone());
            async move {
                let turn = turns.turn(turns.alone(grammar(number)).await).await;
                let work = move || {
                    begun.fetch_add(1, Ordering::SeqCst);
                    end.into_iter().for_each(|end| end.recv().unwrap());
                };
                turn.run(work).await
            }
        };
        let slow = ended.into_iter().enumerate();
        let mut slow: Vec<_> = slow.map(|(at, end)| Box::pin(compile(at, Some(end)))).collect();
        assert!(slow.iter_mut().all(|slow| poll(slow.as_mut()).is_pending()));
        {
            // One client waits for a turn and leaves.
            let left = pin!(compile(COMPILE_TURNS, None));
            assert!(poll(left).is_pending());
        }
        // Others leave while their grammars are compiled, whose turns go on.
        slow.truncate(1);
        let mut last = pin!(compile(COMPILE_TURNS, None));
        assert!(poll(last.as_mut()).is_pending());
        ends.iter().for_each(|end| end.send(()).unwrap());
        runtime.block_on(slow.remove(0)).unwrap();
        runtime.block_on(last).unwrap();
        assert_eq!(begun.load(Ordering::SeqCst), COMPILE_TURNS + 1);
    }

    #[test]
    fn equal_grammars_wait_for_each_other_alone() {
        let turns = CompileTurns::default();
        let Poll::Ready(first) = poll(pin!(turns.alone(grammar(1)))) else { panic!("it waits") };
        let mut equal = pin!(turns.alone(grammar(1)));
        assert!(poll(equal.as_mut()).is_pending());
        assert!(poll(pin!(turns.alone(grammar(2)))).is_ready());
        drop(first);
        assert!(poll(equal).is_ready());
        // What nothing waits for any more is forgotten.
        assert!(poll(pin!(turns.alone(grammar(3)))).is_ready());
        assert_eq!(turns.grammars.lock().unwrap().len(), 1);
    }
}
