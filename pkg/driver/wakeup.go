package driver

// wake signals c, a channel of capacity one. It does not block if a signal is already in the
// channel.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
