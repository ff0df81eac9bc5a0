package nvidia

import (
	"sync"
	"time"
)

// openings counts the cards that have not answered yet. The driver attaches GPUs one after another,
// and a GPU that nothing holds takes seconds: so a card may wait for all the others, and does not
// hang. Until all have answered, limits are those of all that wait, and begin again with each answer.
type openings struct {
	mu      sync.Mutex
	waiting int
	another chan struct{} // closed when one card less waits
}

func newOpenings() *openings { return &openings{another: make(chan struct{})} }

// enter counts a card until done: it has answered, or is not waited for any more. done may be called again.
func (o *openings) enter() (done func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting++
	return sync.OnceFunc(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.waiting--
		close(o.another)
		o.another = make(chan struct{})
	})
}

// limit is how long a card may take from now on that may take so long for itself. After another it
// is to be asked again.
func (o *openings) limit(own time.Duration) (now time.Duration, another <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return own * time.Duration(max(1, o.waiting)), o.another
}
