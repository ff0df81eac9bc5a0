package steps

import "sync"

// Pass is one pass of Reconcile over all claims. It remembers which shared settings and
// daemons were restored, so that each is restored once however many claims share it. A nil pass
// remembers nothing.
type Pass struct {
	mu   sync.Mutex
	done map[string]error
}

// NewPass returns a pass that has restored nothing.
func NewPass() *Pass { return &Pass{done: map[string]error{}} }

// once calls work only for the first call with this key in the pass. A later call with the key
// returns the error that work returned then. Concurrent callers with the same key must hold the
// same lock.
func (pass *Pass) once(key string, work func() error) error {
	if pass == nil {
		return work()
	}
	pass.mu.Lock()
	err, done := pass.done[key]
	pass.mu.Unlock()
	if done {
		return err
	}
	err = work()
	pass.mu.Lock()
	defer pass.mu.Unlock()
	pass.done[key] = err
	return err
}

// Reset forgets which settings and daemons the pass has restored. A caller that recreates a
// partition calls Reset, because an MPS daemon on the partition must be restarted.
func (pass *Pass) Reset() {
	if pass != nil {
		pass.mu.Lock()
		defer pass.mu.Unlock()
		clear(pass.done)
	}
}
