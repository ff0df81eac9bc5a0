package driver

// wakeup wakes the goroutine that receives from it. Signals that arrive before it wakes count as
// one.
type wakeup chan struct{}

// Wake does not block.
func (w wakeup) Wake() { wake(w) }
