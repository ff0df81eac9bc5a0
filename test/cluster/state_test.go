package cluster

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLockIsExclusiveAndHonoursContext(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cluster")
	unlock, err := lockDir(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := lockDir(ended, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("a second lock: %v, want the context's error", err)
	}
	unlock()
	again, err := lockDir(context.Background(), dir)
	if err != nil {
		t.Fatalf("lock the folder again after unlocking: %v", err)
	}
	again()
}

func TestLockOnRemovedFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cluster")
	unlock, err := lockDir(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	locked := make(chan error, 1)
	go func() {
		unlockSecond, err := lockDir(context.Background(), dir)
		if err == nil {
			defer unlockSecond()
			_, err = os.Stat(dir)
		}
		locked <- err
	}()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	unlock()
	if err := <-locked; err != nil {
		t.Errorf("the second lock is on a folder that does not exist: %v", err)
	}
}

// Two clusters start while a third one is taken down, which removes the common folder if it is
// empty.
func TestLockWhileParentIsRemoved(t *testing.T) {
	root := filepath.Join(t.TempDir(), "clusters")
	dir := filepath.Join(root, "cluster")
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Remove(dir)
				_ = os.Remove(root)
			}
		}
	}()
	for range 2000 {
		unlock, err := lockDir(context.Background(), dir)
		if err != nil {
			t.Error(err)
			break
		}
		unlock()
	}
	close(done)
	<-ended
}
