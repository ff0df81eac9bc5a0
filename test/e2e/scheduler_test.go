package e2e

import (
	"errors"
	"fmt"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// schedulerKnowsSlices waits until the scheduler knows the ResourceSlices that the test has seen.
// On a busy machine the scheduler may see a new Pod before older changes of slices, and allocate a
// device of the old ones. It sees slices in order, so it knows them once it allocates a newer one.
func (w *world) schedulerKnowsSlices(t *testing.T) {
	t.Helper()
	driver := fmt.Sprintf("newer-%d.test", time.Now().UnixNano())
	slices, classes := w.Client.ResourceV1().ResourceSlices(), w.Client.ResourceV1().DeviceClasses()
	_, err := slices.Create(t.Context(), &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, AllNodes: ptr.To(true), Devices: []resourceapi.Device{{Name: "one"}},
			Pool: resourceapi.ResourcePool{Name: driver, ResourceSliceCount: 1},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = classes.Create(t.Context(), &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{
			{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "` + driver + `"`}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	u := w.tenant(t)
	u.template("newer", `requests: [{name: one, exactly: {deviceClassName: `+driver+`}}]`)
	u.pod("newer", fromTemplate("newer", "newer"))
	eventually(t, 20*time.Second, "the scheduler knows the newest ResourceSlices", func() (bool, string) {
		p := u.get("newer")
		return p.Spec.NodeName != "", fmt.Sprint(p.Status.Conditions)
	})
	w.deletePods(t, u.namespace, "newer") // its driver does not exist, so it never starts
	if err := errors.Join(
		slices.Delete(t.Context(), driver, metav1.DeleteOptions{}), classes.Delete(t.Context(), driver, metav1.DeleteOptions{}),
	); err != nil {
		t.Error(err)
	}
}
