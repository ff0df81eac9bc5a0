package durabletest

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
)

// patience is how long a call may take that must not wait for anybody. No test expects that much
// time to pass.
const patience = 10 * time.Second

// Pipe puts a pipe at path, in place of what is there. An open of it for reading waits for a
// writer, which never comes. At the end of the test such an open returns.
func Pipe(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0); err == nil {
			_ = f.Close()
		}
	})
}

// Returns calls call, and ends the test if it has not returned in time.
func Returns(t *testing.T, call func()) {
	t.Helper()
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		call()
	}()
	select {
	case <-returned:
	case <-time.After(patience):
		t.Fatal("the call waits for a writer of the pipe")
	}
}
