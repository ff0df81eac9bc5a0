// Package wake lets one goroutine wake another without waiting for it.
package wake

// Signal wakes the goroutine that receives from it. Several wakes before it receives count once.
type Signal chan struct{}

// New returns a Signal.
func New() Signal { return make(Signal, 1) }

// Wake wakes the receiver, now or when it next receives. It does not block.
func (s Signal) Wake() {
	select {
	case s <- struct{}{}:
	default:
	}
}
