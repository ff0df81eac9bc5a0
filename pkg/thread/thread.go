// Package thread runs code that changes its operating system thread.
package thread

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnSpare calls f on a thread that ends afterwards, so that f may move it to other namespaces. That
// is never the main thread, which does not end, and whose namespaces `kubectl exec` enters.
func OnSpare(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		if unix.Gettid() == os.Getpid() {
			defer runtime.UnlockOSThread()
			OnSpare(f) // gets another thread while this goroutine has the main one
			return
		}
		f()
	}()
	<-done
}
