package host

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

func TestErrorWaitsForNoProcessThatHangs(t *testing.T) {
	proc := t.TempDir()
	maps := filepath.Join(proc, "7", "maps")
	if err := os.Mkdir(filepath.Dir(maps), 0o700); err != nil {
		t.Fatal(err)
	}
	// The read of a pipe without a writer blocks, as that of a locked memory map does.
	if err := syscall.Mkfifo(maps, 0o600); err != nil {
		t.Fatal(err)
	}
	defer func() { // ends the read
		if writer, err := os.OpenFile(maps, os.O_WRONLY, 0); err == nil {
			_ = writer.Close()
		}
	}()
	asked := time.Now()
	for range 2 { // the second call starts no goroutine that hangs, too
		if users := UsersForError(nvidia.Paths{Proc: proc}, GPUNodes(0)); len(users) > 0 {
			t.Errorf("got users %v of a /proc that does not answer", users)
		}
	}
	if took := time.Since(asked); took > 10*time.Second {
		t.Errorf("gave up after %s", took)
	}
}
