package steps

import "sync"

// Pass is one pass of Reconcile over all claims. It remembers which shared settings and
// daemons were restored, so that each is restored once however many claims share it. A nil pass
// remembers nothing.
type Pass struct{ done sync.Map }

// once calls work only for the first call with this key in the pass. A later call with the key
// returns the error that work returned then.
func (pass *Pass) once(key string, work func() error) error {
	if pass == nil {
		return work()
	}
	restored, _ := pass.done.LoadOrStore(key, sync.OnceValue(work))
	return restored.(func() error)()
}

// Reset forgets which settings and daemons the pass has restored. A caller that recreates a
// partition calls Reset, because an MPS daemon on the partition must be restarted.
func (pass *Pass) Reset() {
	if pass != nil {
		pass.done.Clear()
	}
}
