package driver

// wakeup wakes the goroutine that receives from it. Signals that arrive before it wakes count as
// one.
type wakeup chan struct{}

// Wake does not block.
func (w wakeup) Wake() { wake(w) }

// wake signals c, a channel of capacity one. It does not block if a signal is already in the
// channel.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
