'use strict';
// Updates the page every two seconds with the server's current version. Without scripts the page is
// the same, and its link reloads it.
(() => {
  const main = document.querySelector('main[data-live]');
  const state = document.getElementById('live');
  if (!main || !state) return;
  const link = state.querySelector('a');

  const same = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName
    && (a.nodeType !== Node.ELEMENT_NODE || (a.id === b.id && a.dataset.key === b.dataset.key));

  // Changes only the nodes that differ, so that focus, selections, opened sections and typed text
  // stay.
  const mend = (old, fresh) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== 'open') old.removeAttribute(name);
    }
    mendChildren(old, fresh);
  };

  const mendChildren = (old, fresh) => {
    let at = old.firstChild;
    for (const node of [...fresh.childNodes]) {
      if (at && same(at, node)) {
        mend(at, node);
        at = at.nextSibling;
        continue;
      }
      let found = node.dataset?.key ? at : null;
      while (found && !same(found, node)) found = found.nextSibling;
      if (found) mend(found, node);
      old.insertBefore(found ?? node, at);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  };

  const say = (kind, ...parts) => {
    const text = parts.map((part) => part.textContent ?? part).join('');
    if (state.dataset.state === kind && state.textContent === text) return;
    state.dataset.state = kind;
    state.replaceChildren(...parts);
  };

  let source = null;
  let later;
  const begin = () => {
    source = new EventSource(location.href);
    source.onmessage = (event) => {
      const fresh = document.createElement('template');
      fresh.innerHTML = event.data;
      mendChildren(main, fresh.content);
      say('on', 'live');
    };
    source.addEventListener('problem', (event) => say('off', `not up to date: ${event.data}`));
    source.onerror = () => {
      if (source?.readyState !== EventSource.CLOSED) {
        say('off', 'not up to date: no answer; retrying');
        return;
      }
      // The browser gives up after an answer other than 200: the server or a proxy is overloaded or
      // restarts, or the session has ended. The link then leads to the login.
      say('off', 'not up to date. ', link);
      end();
      later = setTimeout(look, 15000 + Math.random() * 15000);
    };
  };
  const end = () => {
    clearTimeout(later);
    source?.close();
    source = null;
  };
  // A hidden page needs no updates.
  const look = () => (document.hidden ? end() : source ?? begin());
  document.addEventListener('visibilitychange', look);
  addEventListener('pagehide', end);
  look();
})();
