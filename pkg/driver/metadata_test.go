package driver

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

func TestMetadataFilesLiveAsLongAsTheirClaims(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	file := func(uid string) string { return filepath.Join(n.cfg.PluginDir, "metadata", uid+"_gpu.json") }
	describes := func(uid, uuid string) {
		t.Helper()
		f, err := os.Open(file(uid))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		var m metadata.DeviceMetadata
		if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(f), &m); err != nil {
			t.Fatal(err)
		}
		if string(m.UID) != uid || *m.Requests[0].Devices[0].Attributes["uuid"].StringValue != uuid {
			t.Errorf("the metadata of %s is %+v", uid, m)
		}
	}
	gone := func(uid string) bool { _, err := os.Stat(file(uid)); return os.IsNotExist(err) }

	// A killed call left a file, and its claim has no record.
	if err := os.MkdirAll(filepath.Dir(file("uid-dead")), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file("uid-dead"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	// The first reconciliation runs while the plugin starts to serve.
	eventually(t, "what a killed call left is removed", func() bool { return gone("uid-dead") })
	n.register(t)
	eventually(t, "the GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	held := n.claim(t, "held", "gpu-0000-1b-00-0")
	if msg := n.prepare(t, held).GetError(); msg != "" {
		t.Fatal(msg)
	}
	describes("uid-held", "GPU-0000:1b:00.0")

	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	n.register(t)
	describes("uid-held", "GPU-0000:1b:00.0")

	// A namesake is prepared before the old claim is unprepared, and keeps its files.
	if err := n.client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "held", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	namesake := &drapb.Claim{Namespace: "team", Name: "held", Uid: "uid-namesake"}
	n.claimAs(t, namesake, "gpu-0000-43-00-0")
	if msg := n.prepare(t, namesake).GetError(); msg != "" {
		t.Fatal(msg)
	}
	if msg := n.unprepare(t, held); msg != "" {
		t.Error(msg)
	}
	if !gone("uid-held") {
		t.Error("the files of an unprepared claim are still there")
	}
	describes("uid-namesake", "GPU-0000:43:00.0")
	if msg := n.unprepare(t, namesake); msg != "" {
		t.Error(msg)
	}
	if left, err := os.ReadDir(filepath.Join(n.cfg.PluginDir, "metadata")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
