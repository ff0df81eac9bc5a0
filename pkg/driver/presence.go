package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// presenceFile is in the plugin directory, which all instances share.
const presenceFile = "instances.lock"

// presencePoll is how often a starting instance looks whether another one has finished removing what was made on the node.
const presencePoll = 20 * time.Millisecond

// presence is how the instances on a node, of one release or of several, know that others live: each holds a shared flock from its start to its end.
// Who wants to remove what all of them use needs it for itself alone. A killed instance loses its flock with its process.
type presence struct{ file *flock.Flock }

// bePresent waits only while another instance is removing everything, and makes the directory anew then.
func bePresent(ctx context.Context, pluginDir string) (*presence, error) {
	for {
		if err := os.MkdirAll(pluginDir, 0o755); err != nil {
			return nil, fmt.Errorf("create the plugin directory: %w", err)
		}
		// What lies below it says what this process does as root, and what the container runtime runs as a hook.
		if err := durable.CheckDir(pluginDir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("use the plugin directory: %w", err)
		}
		p := &presence{flock.New(filepath.Join(pluginDir, presenceFile), flock.SetPermissions(0o600))}
		_, err := p.file.TryRLockContext(ctx, presencePoll)
		if err == nil && p.named() {
			return p, nil
		}
		p.End()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("tell other instances of the plugin of this one: %w", err)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// Alone ends this instance's presence, and says whether no other one lives. If so, none can start until End. Of several that ask at the same time, the
// last one is alone, or another one is: that one has it for itself then.
func (p *presence) Alone() (bool, error) {
	p.End() // first: two that turned their shared locks into exclusive ones would both be refused
	// Not made anew: who finds it gone comes when another one is about to have removed everything.
	p.file = flock.New(p.file.Path(), flock.SetFlag(os.O_RDONLY))
	alone, err := p.file.TryLock()
	if errors.Is(err, fs.ErrNotExist) || alone && !p.named() {
		p.End()
		return false, nil // another one was alone and has removed everything; who has started since has another file
	}
	if err != nil {
		return false, fmt.Errorf("look whether another instance of the plugin lives: %w", err)
	}
	return alone, nil
}

// End gives up what is held. It may be called more than once.
func (p *presence) End() { _ = p.file.Close() }

// named says whether the locked file is still the one that others find: it is removed with the rest.
func (p *presence) named() bool {
	held, err := p.file.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(p.file.Path())
	return err == nil && os.SameFile(held, now)
}
