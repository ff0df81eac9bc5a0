package mps

import (
	"os"
	"slices"
	"syscall"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/cuda"
)

// attach is one client's request to the control daemon to be admitted to a server.
type attach struct {
	pid  int32
	user uint32
	not  int
	gone bool
	// server is the server that the client was assigned to, or nil.
	server *server
}

// letIn admits or refuses a client and sends it the answer. who has the client's credentials. After
// a refusal it returns, and after an admission it first waits until the client has closed the
// connection.
func (c *control) letIn(connection *conn, who *syscall.Ucred, asked request) {
	client := &attach{pid: who.Pid, user: who.Uid, not: asked.Not}
	if c.multiUser {
		client.user = 0 // with -multiuser-server all clients count as clients of root
	}
	if os.Getuid() != 0 && who.Uid != uint32(os.Getuid()) {
		_ = connection.encoder.Encode(
			answer{Error: cuda.Errorf(cuda.MPSConnectionFailed,
				"the control daemon runs as user %d and cannot serve user %d", os.Getuid(), who.Uid)},
		)
		return
	}
	go c.watch(connection, client)
	_ = connection.encoder.Encode(c.admit(client, func() { _ = connection.encoder.Encode(answer{Pending: true}) }))
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if client.server == nil {
		return
	}
	for !client.gone { // the client closes this connection once the server has admitted it
		c.changed.Wait()
	}
	client.server.joining--
	c.changed.Broadcast()
}

// watch waits until the client closes the connection, and then sets client.gone and wakes the
// goroutines that wait for a change.
func (c *control) watch(connection *conn, client *attach) {
	var more request
	_ = connection.decoder.Decode(&more) // the client sends nothing more; Decode returns when the connection closes
	c.mutex.Lock()
	client.gone = true
	c.mutex.Unlock()
	c.changed.Broadcast()
}

// admit waits until the client may connect to a server, or can never do so, and returns the answer.
// Clients of the server's user enter at once. A client of another user waits until that server has
// ended, and later clients wait behind it.
func (c *control) admit(client *attach, pending func()) answer {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.waiting = append(c.waiting, client)
	defer func() {
		c.waiting = slices.DeleteFunc(c.waiting, func(other *attach) bool { return other == client })
		c.changed.Broadcast()
	}()
	for notified := false; ; {
		switch {
		case client.gone:
			return answer{}
		case c.ending:
			return answer{Error: cuda.Errorf(cuda.MPSServerNotReady, "the control daemon is shutting down")}
		case c.waiting[0] != client:
		case c.server == nil:
			c.startServer(client.user)
			continue
		case c.server.failed != nil:
			failed := c.server.failed
			c.server = nil
			return answer{Error: failed}
		case c.server.pid == client.not:
		case c.server.ready && !c.server.draining && c.server.user == client.user:
			c.log.printf("NEW CLIENT %d from user %d: Server already exists", client.pid, client.user)
			client.server = c.server
			c.server.joining++
			return answer{Socket: c.server.socket, Server: c.server.pid}
		case c.server.user != client.user && !c.server.draining && c.server.joining == 0:
			c.log.printf("NEW CLIENT %d from user %d: Server of user %d is asked to end", client.pid, client.user, c.server.user)
			c.server.drain()
			continue
		}
		if !notified {
			notified = true
			c.log.printf("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", client.pid, client.user)
			c.mutex.Unlock()
			pending()
			c.mutex.Lock()
			continue
		}
		c.changed.Wait()
	}
}
