// Package tail keeps the end of what a program writes.
package tail

import (
	"bytes"
	"strings"
	"sync"
)

// Writer keeps the last bytes written to it.
type Writer struct {
	Limit int
	mu    sync.Mutex
	kept  []byte
}

func (t *Writer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.Limit; over > 0 {
		t.kept = bytes.Clone(t.kept[over:])
	}
	return len(p), nil
}

func (t *Writer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.kept) == 0 {
		return ""
	}
	return ": " + strings.TrimSpace(string(t.kept))
}

// Text returns the kept end of the output.
func (t *Writer) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.ToValidUTF8(t.kept, []byte("?")))
}
