package child

import (
	"bytes"
	"strings"
	"sync"
)

// Tail is a writer that keeps the last bytes written to it.
type Tail struct {
	Limit int
	mu    sync.Mutex
	kept  []byte
}

func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.Limit; over > 0 {
		t.kept = bytes.Clone(t.kept[over:])
	}
	return len(p), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.kept) == 0 {
		return ""
	}
	return ": " + strings.TrimSpace(string(t.kept))
}

// Text returns the kept end of the output.
func (t *Tail) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.ToValidUTF8(t.kept, []byte("?")))
}
